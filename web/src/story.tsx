// What the rules found, in the order of time: the first of a group is what set off the others.

import type { Finding, Run } from "./answers.ts";
import { MARKS } from "./matrix.tsx";
import { said, together } from "./ranks.ts";
import { counted } from "./text.ts";

interface Props { run: Run; onGo: (finding: Finding) => void; selected: string }

export function Story({ run, onGo, selected }: Props) {
  const groups = [...run.groups].sort((a, b) => run.findings[a[0]!]!.step - run.findings[b[0]!]!.step);
  return (
    <section class="story" aria-label="findings">
      <h2>{run.findings.length ? counted(run.findings.length, "finding") : "Nothing found"}</h2>
      {!run.findings.length && (
        <p class="quiet">{run.clean.length ? `${counted(run.clean.length, "rule")} looked and found nothing.` : "No rule has had what it needs so far."}</p>
      )}
      <ol>
        {groups.map((group) => (
          <li class="group">
            {together(group, run).map(({ i, ranks }, k) => <Item finding={run.findings[i]!} ranks={said(ranks, run)} follows={k > 0} onGo={onGo} selected={selected} number={i} />)}
          </li>
        ))}
      </ol>
      {run.clean.length > 0 && <details><summary>{counted(run.clean.length, "rule")} clean</summary><p>{run.clean.join(" · ")}</p></details>}
      {run.unchecked.length > 0 && (
        <details>
          <summary>{counted(run.unchecked.length, "rule")} not checked</summary>
          <ul class="plain">{run.unchecked.map(([rule, why]) => <li><b>{rule}</b>: {why}</li>)}</ul>
        </details>
      )}
      {run.remarks.map((remark) => <p class="quiet">{remark}</p>)}
    </section>
  );
}

function Item({ finding, ranks, follows, onGo, selected, number }: { finding: Finding; ranks: string; follows: boolean; onGo: (finding: Finding) => void; selected: string; number: number }) {
  const mine = `${finding.model}/${finding.site}` === selected;
  return (
    <button type="button" class={`finding${follows ? " follows" : ""}${mine ? " mine" : ""}`} data-finding={number} onClick={() => onGo(finding)}>
      <span class={`badge ${finding.severity}`} aria-label={finding.severity}>{MARKS[finding.severity] ?? "●"}</span>
      <span>
        <b>{finding.rule}</b> <span class="where">{finding.site ?? ""}</span>
        {ranks && <span class="ranks">{ranks}</span>}
        <span class="step">{finding.until === null ? `step ${finding.step}` : `steps ${finding.step}–${finding.until}`}</span>
        <span class="evidence">{finding.text}</span>
      </span>
    </button>
  );
}

export function Evidence({ finding }: { finding: Finding }) {
  return (
    <div class={`card ${finding.severity}`}>
      <p><span class={`badge ${finding.severity}`}>{MARKS[finding.severity] ?? "●"}</span> <b>{finding.rule}</b> · {finding.until === null ? `since step ${finding.step}` : `steps ${finding.step} to ${finding.until}`}</p>
      <p>{finding.text}</p>
      {finding.why && <p><i>why</i> {finding.why}</p>}
      {finding.then && <p><i>next</i> {finding.then}</p>}
    </div>
  );
}
