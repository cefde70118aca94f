"""The terminal: driver, repaint, lines, clipboard. Most use of Textual's private API is here."""
