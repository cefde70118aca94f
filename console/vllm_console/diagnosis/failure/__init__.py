"""Why a server died: from its log to a named cause, with fixes. Pure."""
