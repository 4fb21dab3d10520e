"""Elastic training: members, newcomers, joining, and the state that a newcomer gets."""
