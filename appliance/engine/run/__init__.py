"""Running plans on a GPU, one step ahead of what it has answered. See device_runner."""
