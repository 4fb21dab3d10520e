"""Workloads say what is trained, by which contenders, and who is slow."""
