"""What a user's own tests may stand on: builders of records whose content shows where it belongs.

Public; no part of the library imports it.
"""
