"""Starting the ranks of a node, or of a Ray cluster; watching them; gathering what they print."""
