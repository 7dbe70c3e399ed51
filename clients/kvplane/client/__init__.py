"""The client SDK: what an engine imports. It never picks a block id and never hides an error."""
