"""Tries headers of real models: whole with sparse weights, and scaled down against transformers."""
