"""From files and words to what a tower reads, without weights: pictures, grids, resolution policies, text, chat."""
