"""Tools for all rooms: errors, files, plug-in registry, formatting, devices, processes. Imports no other room."""
