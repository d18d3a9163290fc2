// Numbers and words as a person reads them.

const SUPER = "⁰¹²³⁴⁵⁶⁷⁸⁹";

/** 0.0123, 1.2e-5, 4,500 */
export function number(value: number | string | null | undefined): string {
  if (value === null || value === undefined) return "–";
  if (typeof value === "string") return value;
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e5 || size < 1e-3) return value.toExponential(1).replace("e+", "e");
  if (size >= 1000) return Math.round(value).toLocaleString("en-US");
  return String(Number(value.toPrecision(3)));
}

/** 10⁻³ */
export function power(exponent: number): string {
  const digits = String(Math.abs(exponent)).split("").map((d) => SUPER[Number(d)]).join("");
  return `10${exponent < 0 ? "⁻" : ""}${digits}`;
}

/** 1.2 M */
export function many(value: number | null | undefined): string {
  if (!value) return "";
  for (const [size, name] of [[1e9, "B"], [1e6, "M"], [1e3, "k"]] as const)
    if (value >= size) return `${Number((value / size).toPrecision(3))} ${name}`;
  return String(value);
}

/** 1 step, 2 steps */
export function counted(value: number, what: string): string {
  return `${value.toLocaleString("en-US")} ${what}${value === 1 ? "" : "s"}`;
}

export function percent(share: number): string {
  return share < 0.1 ? `${(100 * share).toFixed(1)} %` : `${Math.round(100 * share)} %`;
}
