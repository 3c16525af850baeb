"""Checks of machine, settings, files and server; each finding says how to fix it.

`examination` runs them all. Imports torch only in checks that need it.
"""
