"""What every room may use: threads of ours, progress lines, errors of scripts for people, where output goes."""
