"""The terminal: driver, repaint, lines, clipboard. Everything that relies on Textual's private API is here."""
