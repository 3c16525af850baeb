"""Files beside a model's weights: settings, recipes, names. Imports no torch."""
