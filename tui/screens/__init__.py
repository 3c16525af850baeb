"""The screens of the dashboard and the dialogs over them."""
