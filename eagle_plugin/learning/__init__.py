"""From prompts to a deployed head: data, training, evaluation, jobs, deployment, reports."""
