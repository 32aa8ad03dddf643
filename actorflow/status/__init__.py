"""Find out what every rank of a run is doing and which ranks it waits for, while the run goes on or is stuck."""
