"""The control plane: which block, which prefix, and who yields. It never touches a tensor."""
