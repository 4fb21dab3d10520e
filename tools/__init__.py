"""Tools of the build and of the Makefile; not part of the package."""
