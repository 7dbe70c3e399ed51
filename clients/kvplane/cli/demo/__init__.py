"""`kvplane demo`: a real model generates through both services, and what is claimed is checked before your eyes."""
