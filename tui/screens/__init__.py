"""The pages of the dashboard and the dialogs over them."""
