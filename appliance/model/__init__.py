"""Describes models as data and executes them with torch or the CPU library."""
