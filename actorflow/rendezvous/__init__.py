"""Find a process's place in a run: the options asked for, the engine that started it, its address and device."""
