"""A report goes from repeats to a committed result, beside what no schedule can beat."""
