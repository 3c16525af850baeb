"""Attention of many rows of a sequence: a program takes a tile of rows and all their keys."""
