"""Faults that strike a job, and the workers that they strike."""
