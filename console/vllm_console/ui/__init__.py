"""The Textual app. Only here is textual imported."""
