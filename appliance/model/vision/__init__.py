"""Towers that turn pictures into rows of a decoder: described as data, run by its executors."""
