"""The commands of ``actorflow``, a file for each."""
