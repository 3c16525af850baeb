"""Set-up instructions for clients, with address, key and model filled in."""

from appliance.connect.clients import RECIPES
from appliance.connect.recipe import Connection, Recipe, SetupStep

__all__ = ["RECIPES", "Connection", "Recipe", "SetupStep"]
