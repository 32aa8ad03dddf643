"""A process's calls of jobs: find a valid plan or compile one, issue the call, and handle its end or failure."""
