"""What the plugins share: what was asked, a request's rows on their way, and whether the hooks are there."""
