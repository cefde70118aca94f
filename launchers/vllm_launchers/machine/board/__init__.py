"""The board that people of one machine share: who runs what, and which GPUs are claimed till when. A folder."""
