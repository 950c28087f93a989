"""`python -m app report RUN ...`: tables and pictures of runs, from their folders alone."""
