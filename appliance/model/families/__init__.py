"""A declarative file per model family; nothing outside this folder knows a family's name."""
