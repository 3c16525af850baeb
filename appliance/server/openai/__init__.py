"""OpenAI's routes: chat completions, text completions, models."""
