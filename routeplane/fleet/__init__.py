"""Start-up of a fleet: reserved endpoints, plans of tasks, and the actors that run in it.

Loads neither Ray nor an engine: each module is imported by the program that needs it.
"""
