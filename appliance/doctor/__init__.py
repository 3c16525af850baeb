"""Checks of machine, settings, files and server; each finding says how to fix it.

`examination` runs them. Only checks that need torch import it.
"""
