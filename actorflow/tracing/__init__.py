"""Record what ranks do, bring it onto one clock, and report what a run waited for."""
