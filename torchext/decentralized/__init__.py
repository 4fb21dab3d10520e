"""Parameters are averaged: the synchronizers of prague, dssync and hop."""
