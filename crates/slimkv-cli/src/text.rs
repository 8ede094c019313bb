//! Small text work that several commands share: tables, sizes, lists of methods.

/// A table with a header; the first column is left-aligned, the others right-aligned.
pub struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table with these column titles.
    pub fn new(header: &[&str]) -> Self {
        Table { rows: vec![header.iter().map(|s| s.to_string()).collect()] }
    }

    /// Adds a row.
    pub fn row(&mut self, cells: Vec<String>) {
        self.rows.push(cells);
    }
}

impl std::fmt::Display for Table {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let columns = self.rows[0].len();
        let width = |c: usize| self.rows.iter().map(|r| r[c].chars().count()).max().unwrap_or(0);
        let widths: Vec<usize> = (0..columns).map(width).collect();
        for row in &self.rows {
            let mut line = String::new();
            for (c, cell) in row.iter().enumerate() {
                let gap = if c == 0 { "" } else { "  " };
                let width = widths[c];
                line += &if c == 0 { format!("{cell:<width$}") } else { format!("{gap}{cell:>width$}") };
            }
            writeln!(f, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

/// Bytes for people: `1.3 MiB`.
pub fn bytes(n: u64) -> String {
    const UNITS: [&str; 4] = ["KiB", "MiB", "GiB", "TiB"];
    if n < 1024 {
        return format!("{n} B");
    }
    let mut value = n as f64 / 1024.0;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{value:.1} {}", UNITS[unit])
}

/// A whole number for people: `1,234,567`.
pub fn thousands(n: u64) -> String {
    let digits = n.to_string();
    let mut text = String::new();
    for (i, c) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(c);
    }
    text
}

/// Reads an amount of memory: `8GiB`, `8G`, `24GB`, `512MiB`, `1000000`.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    let bad = || format!("expected an amount of memory such as 8GiB, 24GB or 512MiB, found `{text}`");
    let trimmed = text.trim();
    let split = trimmed.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(trimmed.len());
    let (number, unit) = trimmed.split_at(split);
    let number: f64 = number.parse().map_err(|_| bad())?;
    let factor = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1.0,
        "k" | "kib" => 1024.0,
        "m" | "mib" => 1024.0 * 1024.0,
        "g" | "gib" => 1024.0 * 1024.0 * 1024.0,
        "t" | "tib" => 1024.0 * 1024.0 * 1024.0 * 1024.0,
        "kb" => 1e3,
        "mb" => 1e6,
        "gb" => 1e9,
        "tb" => 1e12,
        _ => return Err(bad()),
    };
    Ok((number * factor) as u64)
}

/// Splits a list of methods at commas and semicolons. A method's own options hold commas too, and are told apart by
/// their `=`: `fp16,kivi:k4v2,group=32,kivi:2` is three methods.
pub fn split_methods(lists: &[String]) -> Vec<String> {
    let mut methods: Vec<String> = Vec::new();
    for list in lists.iter().flat_map(|l| l.split(';')) {
        let mut first = true;
        for piece in list.split(',').map(str::trim).filter(|p| !p.is_empty()) {
            let head = piece.split(':').next().unwrap_or_default();
            match methods.last_mut() {
                Some(method) if !first && head.contains('=') => {
                    method.push(',');
                    method.push_str(piece);
                }
                _ => methods.push(piece.to_string()),
            }
            first = false;
        }
    }
    methods
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn methods_split_where_a_new_one_starts() {
        let split = |s: &str| split_methods(&[s.to_string()]);
        assert_eq!(split("fp16,kivi:8, kivi:4"), ["fp16", "kivi:8", "kivi:4"]);
        assert_eq!(split("kivi:k4v2,group=32,residual=128,fp16"), ["kivi:k4v2,group=32,residual=128", "fp16"]);
        assert_eq!(split("kivi:2,first=2:8,last=2:8,kivi:2"), ["kivi:2,first=2:8,last=2:8", "kivi:2"]);
        assert_eq!(split("snapkv:1024+kivi:4,group=64;fp16"), ["snapkv:1024+kivi:4,group=64", "fp16"]);
        assert_eq!(split_methods(&["fp16".into(), "kivi:4".into()]), ["fp16", "kivi:4"]);
    }

    #[test]
    fn amounts_of_memory() {
        assert_eq!(parse_bytes("8GiB"), Ok(8 << 30));
        assert_eq!(parse_bytes("1.5k"), Ok(1536));
        assert_eq!(parse_bytes("24GB"), Ok(24_000_000_000));
        assert!(parse_bytes("lots").is_err());
        assert!(parse_bytes("8 parsecs").is_err());
        assert_eq!(bytes(1536), "1.5 KiB");
        assert_eq!(thousands(1234567), "1,234,567");
    }

    #[test]
    fn a_table_aligns() {
        let mut table = Table::new(&["method", "ppl"]);
        table.row(vec!["fp16".into(), "21.1".into()]);
        assert_eq!(table.to_string(), "method   ppl\nfp16    21.1\n");
    }
}
