"""The report of a training job: one page, as HTML and as Markdown, from the files that its stages wrote."""
