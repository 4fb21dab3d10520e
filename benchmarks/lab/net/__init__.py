"""Hosts and links that are emulated on one machine."""
