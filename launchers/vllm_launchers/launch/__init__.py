"""Request → plan → keeper: the implementation of ``start`` and ``restart``. Console-specific parts are injected."""
