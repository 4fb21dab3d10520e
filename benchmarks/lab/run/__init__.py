"""Ranks are started, given their settings, and never left behind."""
