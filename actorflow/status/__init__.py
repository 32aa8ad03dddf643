"""What every rank is at enters; who waits for whom, while a job runs or is stuck, leaves."""
