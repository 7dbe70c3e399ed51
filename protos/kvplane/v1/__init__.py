"""Generated messages and stubs of the `kvplane.v1` contract. Written by `make protos`; never edited by hand."""
