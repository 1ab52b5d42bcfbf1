"""The asyncio runtime: contexts, journals, starts and resumes around the sans-I/O core."""
