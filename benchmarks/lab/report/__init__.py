"""From repeats to a committed result, beside what no schedule can beat."""
