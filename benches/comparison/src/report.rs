//! The values of a run: a table that a person can read, and one line for each goal.

use std::collections::BTreeMap;

use crate::measure::median;

/// Values by variant and column, one of each round.
pub struct Table {
    title: String,
    ours: &'static str,
    variants: Vec<&'static str>,
    columns: Vec<Column>,
    values: BTreeMap<(&'static str, &'static str), Vec<f64>>,
}

struct Column {
    name: &'static str,
    digits: usize,
}

/// The name of a variant without a lock.
pub const NO_LOCK: &str = "no lock";

/// The bound that a value must keep.
#[derive(Clone, Copy)]
pub enum Target {
    AtLeast(f64),
    AtMost(f64),
}

#[derive(Default)]
pub struct Goals(Vec<Goal>);

struct Goal {
    name: String,
    /// None if the measurement was skipped.
    value: Option<f64>,
    target: Target,
}

// === impl Table ===

impl Table {
    /// Columns are names and digits after the point. The first column is compared with that of
    /// `ours`: per second, more is better; otherwise less is.
    pub fn new(title: impl Into<String>, ours: &'static str, columns: &[(&'static str, usize)]) -> Self {
        let columns = columns.iter().map(|&(name, digits)| Column { name, digits }).collect();
        Self { title: title.into(), ours, variants: Vec::new(), columns, values: BTreeMap::new() }
    }

    pub fn push(&mut self, variant: &'static str, column: &'static str, value: f64) {
        debug_assert!(self.columns.iter().any(|known| known.name == column), "{column}");
        if !self.variants.contains(&variant) {
            self.variants.push(variant);
        }
        self.values.entry((variant, column)).or_default().push(value);
    }

    pub fn of(&self, variant: &'static str, column: &'static str) -> &[f64] {
        self.values.get(&(variant, column)).map_or(&[], Vec::as_slice)
    }

    pub fn median(&self, variant: &'static str, column: &'static str) -> f64 {
        median(self.of(variant, column))
    }

    /// The ratio of two variants in each round.
    pub fn ratios(&self, column: &'static str, variant: &'static str, other: &'static str) -> Vec<f64> {
        self.of(variant, column).iter().zip(self.of(other, column)).map(|(value, other)| value / other).collect()
    }

    /// The difference of two variants in each round.
    pub fn differences(&self, column: &'static str, variant: &'static str, other: &'static str) -> Vec<f64> {
        self.of(variant, column).iter().zip(self.of(other, column)).map(|(value, other)| value - other).collect()
    }

    pub fn ratio(&self, column: &'static str, variant: &'static str, other: &'static str) -> f64 {
        median(&self.ratios(column, variant, other))
    }

    /// The medians of a column, in the order of the first round.
    pub fn bars(&self, column: &'static str) -> Vec<(&'static str, f64)> {
        let bars = self.variants.iter().map(|&variant| (variant, self.median(variant, column)));
        bars.filter(|(_, value)| !value.is_nan()).collect()
    }

    pub fn print(&self) {
        let first = self.columns[0].name;
        let cell = |variant, column: &Column| match self.median(variant, column.name) {
            value if value.is_nan() => String::new(),
            value => grouped(value, column.digits),
        };
        let mut rows = vec![vec![self.title.clone()]];
        rows[0].extend(self.columns.iter().map(|column| column.name.to_owned()));
        rows[0].push("beside ours (all rounds)".to_owned());
        for &variant in &self.variants {
            let mut row = vec![variant.to_owned()];
            row.extend(self.columns.iter().map(|column| cell(variant, column)));
            row.push(self.verdict(first, variant));
            rows.push(row);
        }
        if rows[1..].iter().all(|row| row.last().is_some_and(String::is_empty)) {
            rows.iter_mut().for_each(|row| row.truncate(row.len() - 1));
        }
        println!();
        let columns = rows[0].len();
        let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
        let widths: Vec<_> = (0..columns).map(width).collect();
        for row in &rows {
            let cells = row.iter().zip(&widths).enumerate().map(|(at, (cell, &width))| match at {
                at if at == 0 || at > self.columns.len() => format!("{cell:<width$}"),
                _ => format!("{cell:>width$}"),
            });
            println!("{}", cells.collect::<Vec<_>>().join("  ").trim_end());
        }
    }

    /// Says of a peer whether it does better than ours in the first column.
    fn verdict(&self, column: &'static str, variant: &'static str) -> String {
        if is_ours(variant) || variant == NO_LOCK {
            return String::new();
        }
        let ratios = match column.ends_with("/s") {
            true => self.ratios(column, self.ours, variant),
            false => self.ratios(column, variant, self.ours),
        };
        let ours_wins = median(&ratios);
        if ours_wins.is_nan() {
            return String::new();
        }
        let (wins, of): (_, Vec<f64>) = match ours_wins >= 1.0 {
            true => ("ours wins", ratios),
            false => ("it wins", ratios.into_iter().map(f64::recip).collect()),
        };
        let least = of.iter().copied().fold(f64::INFINITY, f64::min);
        let most = of.iter().copied().fold(0.0, f64::max);
        format!("{wins}, {:.2} times [{least:.2} .. {most:.2}]", median(&of))
    }
}

/// The names of our variants start with that of the crate.
pub fn is_ours(variant: &str) -> bool {
    variant.starts_with("tower-lock")
}

/// A number with a space between thousands.
pub fn grouped(value: f64, digits: usize) -> String {
    let text = format!("{value:.digits$}");
    let (whole, rest) = text.split_once('.').map_or((text.as_str(), String::new()), |(a, b)| (a, format!(".{b}")));
    let mut grouped = String::new();
    for (at, digit) in whole.chars().enumerate() {
        if at > 0 && (whole.len() - at) % 3 == 0 && !grouped.ends_with('-') {
            grouped.push(' ');
        }
        grouped.push(digit);
    }
    grouped + &rest
}

// === impl Goals ===

impl Goals {
    pub fn check(&mut self, name: impl Into<String>, value: f64, target: Target) {
        self.0.push(Goal { name: name.into(), value: Some(value), target });
    }

    pub fn skip(&mut self, name: impl Into<String>, target: Target) {
        self.0.push(Goal { name: name.into(), value: None, target });
    }

    /// One line each: `goal NAME VALUE TARGET ok`, or `short` or `skipped` at the end.
    pub fn print(&self) {
        println!();
        for Goal { name, value, target } in &self.0 {
            // A negative value is noise: a difference of two times.
            let (bound, is_kept) = match *target {
                Target::AtLeast(bound) => (format!(">={bound}"), value.is_some_and(|value| value >= bound)),
                Target::AtMost(bound) => {
                    (format!("<={bound}"), value.is_some_and(|value| (0.0..=bound).contains(&value)))
                }
            };
            match value {
                None => println!("goal {name} - {bound} skipped"),
                Some(value) => println!("goal {name} {value:.2} {bound} {}", if is_kept { "ok" } else { "short" }),
            }
        }
    }
}
