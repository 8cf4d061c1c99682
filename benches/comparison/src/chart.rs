//! Bar charts as SVG, for light and for dark backgrounds.

use std::{fmt::Write, path::Path};

use crate::report::{Table, grouped, is_ours};

/// A chart: per group a heading, and one bar for each variant.
pub struct Chart {
    name: &'static str,
    title: String,
    groups: Vec<Group>,
}

struct Group {
    heading: String,
    bars: Vec<(&'static str, f64)>,
    digits: usize,
}

const WIDTH: f64 = 800.0;
const BAR_START: f64 = 230.0;
const BAR_WIDTH: f64 = 460.0;
const ROW: f64 = 26.0;

// === impl Chart ===

impl Chart {
    pub fn new(name: &'static str, title: impl Into<String>) -> Self {
        Self { name, title: title.into(), groups: Vec::new() }
    }

    /// The medians of a column.
    pub fn add(&mut self, heading: impl Into<String>, table: &Table, column: &'static str, digits: usize) {
        let bars = table.bars(column);
        if !bars.is_empty() {
            self.groups.push(Group { heading: heading.into(), bars, digits });
        }
    }

    /// Writes `NAME.svg`.
    ///
    /// # Panics
    ///
    /// Panics if the file cannot be written.
    pub fn write(&self, folder: &Path) {
        let mut rows = String::new();
        let mut y = 62.0;
        for Group { heading, bars, digits } in &self.groups {
            let most = bars.iter().map(|(_, value)| *value).fold(0.0, f64::max);
            let _ = writeln!(rows, r#"<text class="heading" x="24" y="{y}">{}</text>"#, escaped(heading));
            y += 12.0;
            for (variant, value) in bars {
                let width = (value / most * BAR_WIDTH).max(1.0);
                let (class, text) = if is_ours(variant) { ("ours", "own") } else { ("peer", "name") };
                let _ = writeln!(
                    rows,
                    r#"<text class="{text}" x="{:.0}" y="{:.0}" text-anchor="end">{}</text><rect class="{class}" x="{BAR_START}" y="{:.0}" width="{width:.1}" height="18" rx="3"/><text class="value" x="{:.1}" y="{:.0}">{}</text>"#,
                    BAR_START - 10.0,
                    y + 14.0,
                    escaped(variant),
                    y,
                    BAR_START + width + 8.0,
                    y + 14.0,
                    grouped(*value, *digits),
                );
                y += ROW;
            }
            y += 24.0;
        }
        let (title, height) = (escaped(&self.title), y - 16.0);
        let svg = format!(
            r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{title}">
<style>
text {{ font: 13px system-ui, sans-serif; fill: #1f2328 }}
.title {{ font-weight: 600; font-size: 15px }}
.heading {{ fill: #59636e }}
.own {{ font-weight: 600 }}
.value {{ font-variant-numeric: tabular-nums }}
.ours {{ fill: #0969da }}
.peer {{ fill: #afb8c1 }}
@media (prefers-color-scheme: dark) {{
  text {{ fill: #f0f6fc }}
  .heading {{ fill: #9198a1 }}
  .ours {{ fill: #4493f8 }}
  .peer {{ fill: #656c76 }}
}}
</style>
<text class="title" x="24" y="30">{title}</text>
{rows}</svg>
"#
        );
        std::fs::create_dir_all(folder).expect("a folder");
        std::fs::write(folder.join(format!("{}.svg", self.name)), svg).expect("a file");
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('"', "&quot;")
}
