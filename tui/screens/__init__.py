"""The pages of the dashboard, and what lies over them."""
