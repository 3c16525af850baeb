"""Set-up instructions for clients, with address, key and model filled in."""

from appliance.connect.clients import COMMANDS, PROGRAMS
from appliance.connect.recipe import Connection, Recipe, SetupStep

RECIPES = PROGRAMS | COMMANDS

__all__ = ["RECIPES", "Connection", "Recipe", "SetupStep"]
