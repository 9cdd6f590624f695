"""What every room uses: errors, files, plug-in registry, formatting, devices, processes. Imports no other room."""
